#!/usr/bin/env python
"""`matrixtitan sweep` of this clone."""

import entry

entry.run(__file__)
