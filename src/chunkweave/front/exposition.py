"""Metrics of several vLLM servers as those of one: each sample gets a label that names its server."""

import re
from collections.abc import Iterator, Mapping

from chunkweave.front.fleet import Fleet
from chunkweave.server.figures import Figure

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(\{(?P<labels>.*)\})?(?P<rest>\s.*)")


def labelled(expositions: Mapping[str, str]) -> str:
    """Prometheus texts by the name of their server, as one text with the label `replica`.

    Samples of one metric stand together, behind its description, as the format wants it.
    """
    about: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in expositions.items():
        family, seen = "", set[str]()
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                if family not in about or family in seen:
                    about.setdefault(family, []).append(line)
                    seen.add(family)
            elif line and not line.startswith("#"):
                samples.setdefault(family, []).append(_with_label(line, replica))
    lines = [line for family in samples for line in (*about.get(family, ()), *samples[family])]
    return "\n".join(lines) + "\n" if lines else ""


def fleet_figures(fleet: Fleet, restarts: Mapping[str, int], retries: int) -> Iterator[Figure]:
    """What the front knows of its replicas."""
    replicas = fleet.replicas

    def gauge(name: str, meaning: str, values: Mapping[str, float]) -> Figure:
        return Figure(name, meaning, values, "replica")

    yield gauge("replica_up", "Whether a vLLM server answers.", {one.name: float(one.up) for one in replicas})
    yield gauge(
        "replica_requests_running", "Requests given to a vLLM server.", {one.name: one.running for one in replicas}
    )
    yield gauge(
        "replica_requests_waiting", "Requests that wait for one here.", {one.name: len(one.queue) for one in replicas}
    )
    yield gauge(
        "replica_outstanding_tokens",
        "Tokens that it has still to compute, as far as the front knows.",
        {one.name: one.outstanding_tokens for one in replicas},
    )
    yield gauge(
        "replica_mirror_tokens",
        "Tokens that its segment store is believed to hold.",
        {one.name: one.contents.tokens for one in replicas},
    )
    yield Figure(
        "replica_requests",
        "Requests with documents that it answered.",
        {one.name: one.served for one in replicas},
        "replica",
        counter=True,
    )
    if restarts:
        yield Figure("replica_restarts", "How often it was started again.", restarts, "replica", counter=True)
    yield Figure("request_retries", "Requests that were given to a second server.", {"": retries}, counter=True)


def _with_label(line: str, replica: str) -> str:
    found = _SAMPLE.fullmatch(line)
    if found is None:
        return line
    labels = ",".join(filter(None, (f'replica="{replica}"', found["labels"])))
    return f"{found['name']}{{{labels}}}{found['rest']}"
