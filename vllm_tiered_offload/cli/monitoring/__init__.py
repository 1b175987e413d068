# SPDX-License-Identifier: Apache-2.0
"""Reading a running engine's /metrics and showing what the tiers do."""
