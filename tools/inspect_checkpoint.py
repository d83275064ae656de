#!/usr/bin/env python
"""`matrixtitan inspect_checkpoint` of this clone: the program is in `matrixtitan/tools/inspect_checkpoint.py`."""

import entry

entry.run(__file__)
