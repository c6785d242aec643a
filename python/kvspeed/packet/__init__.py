# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""KV Packet: documents whose keys and values are computed once, alone, and used at any position (arXiv:2604.13226)."""
