#!/usr/bin/env python
"""`matrixtitan launch` of this clone."""

import entry

entry.run(__file__)
