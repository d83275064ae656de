#!/usr/bin/env python
"""`matrixtitan plan` of this clone."""

import entry

entry.run(__file__)
