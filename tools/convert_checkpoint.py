#!/usr/bin/env python
"""`matrixtitan convert_checkpoint` of this clone: the program is in `matrixtitan/tools/convert_checkpoint.py`."""

import entry

entry.run(__file__)
