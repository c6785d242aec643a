# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`python -m kvspeed` is `kvspeed`."""

from kvspeed.cli.app import main

if __name__ == "__main__":
    main()
