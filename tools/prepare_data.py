#!/usr/bin/env python
"""`matrixtitan prepare_data` of this clone: the program is in `matrixtitan/tools/prepare_data.py`."""

import entry

entry.run(__file__)
