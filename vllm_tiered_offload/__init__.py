# SPDX-License-Identifier: Apache-2.0
"""A CPU-memory and disk tier for vLLM's KV cache.

Installed next to an unmodified vLLM; see README.md. Importing this package
imports neither vLLM nor torch.
"""

__version__ = "0.1.0"
