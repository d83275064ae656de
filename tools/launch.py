#!/usr/bin/env python
"""`matrixtitan launch` of this clone: the program is in `matrixtitan/tools/launch.py`."""

import entry

entry.run(__file__)
