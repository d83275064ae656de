#!/usr/bin/env python
"""`matrixtitan train_tokenizer` of this clone: the program is in `matrixtitan/tools/train_tokenizer.py`."""

import entry

entry.run(__file__)
