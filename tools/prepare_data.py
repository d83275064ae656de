#!/usr/bin/env python
"""`matrixtitan prepare_data` of this clone."""

import entry

entry.run(__file__)
