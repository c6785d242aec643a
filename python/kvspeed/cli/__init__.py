# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The command line: `kvspeed demo | doctor | pack | ask`. One file a command; nothing here imports torch at its top."""
