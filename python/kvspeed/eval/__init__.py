# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What a method costs and whether its answers are right: FLOPs by formula, times and bytes by measurement, scores."""
