"""What a run says before the first round about its data and the sites' code, where nothing needs to be refused."""

from collections.abc import Mapping, Sequence

from fedsim.data import Benchmark, domain_of


def data_notes(
    bench: Benchmark,
    images: Mapping[str, int],
    sources: Sequence[Sequence[int]],
    target: str,
    tested: Sequence[int],
) -> list[str]:
    """Own splits that are joined, more images than are published, and tested classes that no client trains.

    images: by domain or client. sources: training images of every client by class, empty for one that has not
    answered. tested: tested images of the unseen domain by class.
    """
    notes = []
    if bench.joined:
        notes.append(f"the data set's own splits {', '.join(bench.joined)} are joined and every domain is split anew; "
                     "data.split = 'lists' trains and validates on its splits of these names, and data.test_split = "
                     "'list' tests on its test split alone")  # fmt: skip
    counts = {domain_of(name): count for name, count in images.items()}
    for domain, count in sorted(counts.items()):
        published = (bench.counts or {}).get(domain, count)
        if count > published:
            notes.append(f"{domain} has {count:,} images, and {bench.title} was published with {published:,}; "
                         "results do not compare with published ones if the others are copies")  # fmt: skip
    if bench.task == "classification" and all(sources) and len(tested):
        unseen = untrained_classes(bench.classes, sources, tested)
        if unseen:
            notes.append(f"no client has training images of {', '.join(unseen)}, which {target} is tested on; "
                         "if classes are spelled in two ways, make them equal")  # fmt: skip
    return notes


def untrained_classes(classes: Sequence[str], sources: Sequence[Sequence[int]], tested: Sequence[int]) -> list[str]:
    """The classes that the unseen domain is tested on and of which no client has training images."""
    trained = [sum(column) for column in zip(*sources)]
    return [name for name, images, tests in zip(classes, trained, tested) if tests and not images]


def code_notes(server: Mapping[str, str], sites: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Sites whose code from outside of fedsim is not the server's; they may train by another formula.

    server: the server's versions of the packages from outside. sites: the versions that each site reported.
    """
    notes = []
    for client, versions in sites.items():
        for package, version in server.items():
            if (other := versions.get(package, version)) != version:
                notes.append(f"the site of {client} has {package} {other}, the server {version}; its results may be "
                             "another method's")  # fmt: skip
    return notes
