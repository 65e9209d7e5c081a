"""Every name of the tables of other benchmarks is a row here, or has an answer of one line."""

import shlex

import pytest

from fedsim.common.errors import UserError
from fedsim.methods.assembly import assemble, find_recipe
from fedsim.methods.groups import LISTS, answer_for, elsewhere
from fedsim.methods.table import METHODS
from fedsim.settings.experiment import read_experiment

NAMES = {
    "FedDG_Benchmark": "FedAvg IRM REx Fish MMD DeepCoral GroupDRO FedProx Scaffold AFL FedDG FedADG FedSR FedGMA",
    "MarsFL": "FedAvg FedProx Scaffold FedNova FedBE FedRS FedOPT MOON FedProc FedDyn FedDC FedNTD FedLC FPL FADA COPA "
    "KD3A MCC-DA CSAC FedGA SymF PairF RandomNoise LIE Fang MiMa MiSu Backdoor F3BA FLIP RLR CRFL CFFL CGSV RRFL AFL "
    "qFFL FADE FCFL FedFV Ditto FcclPlus FedDf FedMd RHFL FedProto FedADG FedDG FedSR Bulyan Dnc FLTrust FoolsGold "
    "Krum MultiKrum Rfa SageFlow TrimmedMean qffeAVG COPADA COPADG FedProxGA",
    "DomainBed": "ERM ERMPlusPlus Fish IRM GroupDRO Mixup MLDG CORAL MMD DANN CDANN MTL SagNet ARM VREx RSC SD ANDMask "
    "SANDMask IGA SelfReg Fishr TRM IB_ERM IB_IRM CAD CondCAD Transfer CausIRL_CORAL CausIRL_MMD EQRM RDM ADRMX URM",
}
BENCHMARKS_AND_NAMES = [(benchmark, name) for benchmark, names in NAMES.items() for name in names.split()]


@pytest.mark.parametrize(("benchmark", "name"), BENCHMARKS_AND_NAMES)
def test_every_name_is_a_row_or_has_an_answer(benchmark, name):
    assert [benchmark in entry.lists.split() for entry in elsewhere() if entry.name == name] == [True]
    with pytest.raises(UserError) as error:
        find_recipe(name)
    text = str(error.value)
    assert text.startswith(f"unknown method {name!r}: ")
    assert "known: fedavg" not in text
    assert "\n" not in text


def test_a_near_match_takes_the_place_of_the_list():
    with pytest.raises(UserError) as error:
        find_recipe("mixstile")
    assert str(error.value) == "unknown method 'mixstile'; did you mean 'mixstyle'? all names: fedsim methods"
    with pytest.raises(UserError, match="unknown method 'qqqqqqqqqq'; known: fedavg"):
        find_recipe("qqqqqqqqqq")


def test_the_file_has_each_name_once_and_only_benchmarks_that_are_known():
    names = [entry.name for entry in elsewhere()]
    assert len({name.casefold() for name in names}) == len(names)
    assert {benchmark for entry in elsewhere() for benchmark in entry.lists.split()} == set(LISTS)
    assert [entry.name for entry in elsewhere() if not entry.here and not entry.answer] == []


@pytest.mark.parametrize("entry", [entry for entry in elsewhere() if entry.here], ids=lambda entry: entry.name)
def test_what_a_name_is_called_here_can_be_assembled(entry):
    for method in entry.here.split(", "):
        name, *options = shlex.split(method)
        overrides = [option for option in options if option != "--set"]
        experiment = read_experiment("digits", [f"method.name={name}", *overrides])
        assert assemble(experiment.method, experiment.parts) is not None


@pytest.mark.parametrize("entry", [entry for entry in elsewhere() if not entry.here], ids=lambda entry: entry.name)
def test_the_nearest_methods_of_an_answer_are_rows(entry):
    for phrase in ("nearest: ", "federated form: "):
        if phrase in entry.answer:
            names = entry.answer.split(phrase)[1].split(",")[0].split(" and ")
            rows = [name for name in names if not name.startswith(("method.", "the rules"))]
            assert set(rows) <= set(METHODS)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("REx", "here it is vrex"),
        ("rex", "here it is vrex"),
        ("fedDG-GA", "here it is written feddg-ga"),
        ("FedDG_GA", "here it is written feddg-ga"),
        ("fed adg", "here it is fedadg"),
        ("ERM", "here it is deepall or fedavg (pooled, and on clients)"),
        ("causirl-coral", "not built: coral between random halves of the batch; nearest: coral"),
        ("fedavgg", ""),
    ],
)
def test_case_and_hyphens_of_a_name_do_not_count(name, answer):
    assert answer_for(name, list(METHODS)) == answer
