#!/usr/bin/env python
"""`matrixtitan generate` of this clone: the program is in `matrixtitan/tools/generate.py`."""

import entry

entry.run(__file__)
