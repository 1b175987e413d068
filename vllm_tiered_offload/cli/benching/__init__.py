# SPDX-License-Identifier: Apache-2.0
"""Measuring the store on a user's disk: the store itself, fio beside it, a chart."""
