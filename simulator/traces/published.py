"""Published figures of EPLB on real DeepSeek-R1 routing, to which the trace regimes are fitted.

`published_par.json` has figures only, no trace: mean PAR and transit by dataset, servers and re-planning
interval ("Default": contiguous experts, no replica, no re-planning), with the source. There is one redundant
expert per server and layer; PAR is the mean over layers and iterations; transit counts slots whose content
changed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from eaas.errors import ConfigError

__all__ = ["PublishedFigure", "published"]


@dataclass(frozen=True)
class PublishedFigure:
    """One published measurement of EPLB.

    Attributes:
        servers: S.
        interval: Iterations between plans; None without planning.
        par: Mean PAR over layers and iterations.
        transit: Number of slots that changed.
    """

    servers: int
    interval: int | None
    par: float
    transit: int


def published(dataset: str) -> tuple[PublishedFigure, ...]:
    """Return the published figures of a dataset. Raises ConfigError for an unknown one."""
    datasets = json.loads((Path(__file__).parent / "published_par.json").read_bytes())["datasets"]
    if dataset not in datasets:
        raise ConfigError(f"dataset {dataset}: give one of {', '.join(datasets)}")
    return tuple(
        PublishedFigure(int(servers), None if interval == "Default" else int(interval), *figure)
        for servers, figures in datasets[dataset].items()
        for interval, figure in figures.items()
    )
