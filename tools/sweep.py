#!/usr/bin/env python
"""`matrixtitan sweep` of this clone: the program is in `matrixtitan/tools/sweep.py`."""

import entry

entry.run(__file__)
