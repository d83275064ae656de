#!/usr/bin/env python
"""`matrixtitan generate` of this clone."""

import entry

entry.run(__file__)
