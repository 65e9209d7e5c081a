"""Where the values of a setting that papers tune are drawn from: its field declares it in its annotation.

mu: Annotated[float, Field(ge=0), Tuned("0.001,0.01,0.1", "FedDG_Benchmark")] = 0.1
"""

from fedsim.settings.effect import Facts, Only, conditions, marks

DECADE = "ours: a decade to each side of the default, as in DomainBed"


class Tuned(Only):
    """The space of a setting, as `fedsim search --space` takes it, and the paper or code that it comes from.

    others: values of other settings of its part or section, as in `Only`, with which the space is this one
    """

    def __init__(self, space: str, source: str, **others: object) -> None:
        super().__init__()
        self.space, self.source, self.others = space, source, others

    def words(self) -> str:
        """`log:0.1:10 with optimizer = 'sgd' (DomainBed)`."""
        return f"{self.space}{f' with {self.text()}' if self.others else ''} ({self.source})"


def spaces(settings: object, facts: Facts) -> dict[str, Tuned]:
    """{setting: its space} of those that have a space and an effect with these values of the others."""
    kind: type = type(settings)
    spaces = {}
    for name, spaces_of_field in marks(kind, Tuned).items():
        values = (getattr(settings, name),)
        needs = conditions(kind).get(name, ())
        held = [one for one in spaces_of_field if one.holds(settings, facts, values)]
        if held and (not needs or any(one.holds(settings, facts, values) for one in needs)):
            spaces[name] = held[0]
    return spaces
