"""What a run says before the first round about its data and the sites' code, where nothing needs to be refused."""

from collections.abc import Mapping, Sequence

from fedsim.data import Benchmark, domain_of


def data_remarks(
    found: Benchmark,
    images: Mapping[str, int],
    sources: Sequence[Sequence[int]],
    target: str,
    tested: Sequence[int],
) -> list[str]:
    """Own splits that are joined, more images than are published, and tested classes that no client trains.

    images: by domain or client. sources: training images of every client by class, empty for one that has not
    answered. tested: tested images of the unseen domain by class.
    """
    said = []
    if found.joined:
        said.append(f"the data set's own splits {', '.join(found.joined)} are joined and every domain is split anew; "
                    "data.split = 'lists' trains and validates on its splits of these names, and data.test_split = "
                    "'list' tests on its test split alone")  # fmt: skip
    for domain, count in sorted({domain_of(name): count for name, count in images.items()}.items()):
        published = (found.counts or {}).get(domain, count)
        if count > published:
            said.append(f"{domain} has {count:,} images, and {found.title} was published with {published:,}; "
                        "results do not compare with published ones if the others are copies")  # fmt: skip
    if found.task == "classification" and all(sources) and len(tested):
        trained = [sum(column) for column in zip(*sources)]
        unseen = [name for name, count, own in zip(found.classes, trained, tested) if own and not count]
        if unseen:
            said.append(f"no client has training images of {', '.join(unseen)}, which {target} is tested on; "
                        "if classes are spelled in two ways, make them equal")  # fmt: skip
    return said


def code_remarks(own: Mapping[str, str], sites: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Sites whose code from outside of fedsim is not the server's; they may train by another formula.

    own: the server's versions of the packages from outside. sites: the versions that each site reported.
    """
    return [
        f"the site of {client} has {package} {said[package]}, the server {version}; its results may be another method's"
        for client, said in sites.items()
        for package, version in own.items()
        if said.get(package, version) != version
    ]
