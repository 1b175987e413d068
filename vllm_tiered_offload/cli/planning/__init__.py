# SPDX-License-Identifier: Apache-2.0
"""From a model's config.json to chunks, tokens and bytes, without loading anything."""
