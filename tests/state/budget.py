"""How many examples the state machines run: few by default, as many as ``RADIXKV_TEST_EXAMPLES`` says on request."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings


def budget(examples: int, steps: int) -> settings:
    """Settings for ``examples`` runs of ``steps`` steps; the environment variable RADIXKV_TEST_EXAMPLES replaces the
    number of runs.
    """
    asked = os.environ.get("RADIXKV_TEST_EXAMPLES", "")
    phases = [Phase.explicit, Phase.reuse, Phase.generate]
    if os.environ.get("RADIXKV_TEST_SHRINK"):
        phases.append(Phase.shrink)
    return settings(
        max_examples=int(asked) if asked else examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=phases,
        derandomize=not asked,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
