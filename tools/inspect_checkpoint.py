#!/usr/bin/env python
"""`matrixtitan inspect_checkpoint` of this clone."""

import entry

entry.run(__file__)
