#!/usr/bin/env python
"""`matrixtitan convert_checkpoint` of this clone."""

import entry

entry.run(__file__)
