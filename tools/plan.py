#!/usr/bin/env python
"""`matrixtitan plan` of this clone: the program is in `matrixtitan/tools/plan.py`."""

import entry

entry.run(__file__)
