#!/usr/bin/env python
"""`matrixtitan train_tokenizer` of this clone."""

import entry

entry.run(__file__)
