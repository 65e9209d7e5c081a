"""The images of one domain must not come again in another one, where they would be tested after training on them."""

import shutil

import pytest

from fedsim.data import benchmark
from fedsim.data.fingerprint import fingerprints, refuse_equal_domains
from fedsim.errors import UserError
from fedsim.settings import DataSettings

SAID = r"the domains 'art' and 'copy' of .* have the same 8 images with the same labels; remove one"


def test_a_copied_or_linked_domain_is_refused(tree_settings, tmp_path):
    data, copy = tree_settings(), tmp_path / "images" / "copy"
    assert len(fingerprints(data)) == 3
    shutil.copytree(tmp_path / "images" / "art", copy)
    with pytest.raises(UserError, match=SAID):
        fingerprints(data)
    assert len(fingerprints(data.model_copy(update={"domains": ["copy", "photo"]}))) == 2
    shutil.rmtree(copy)
    copy.symlink_to(tmp_path / "images" / "art")
    with pytest.raises(UserError, match=SAID):
        fingerprints(data)


def test_the_sites_of_a_deployment_are_compared(tree_settings):
    """Two sites of one domain may have the same folder, of which each takes its own part."""
    found, own = benchmark(tree_settings()), {"images": 8, "content": "a" * 20}
    refuse_equal_domains(found, {"art/0": own, "art/1": own, "photo": {"images": 8, "content": "b" * 20}})
    with pytest.raises(UserError, match=SAID):
        refuse_equal_domains(found, {"art": own, "photo": {"images": 8, "content": "b" * 20}, "copy": own})


@pytest.mark.parametrize("dataset", ["digits", "digit-masks"])
def test_domains_that_share_their_images_by_design_are_accepted(dataset):
    assert len({own["content"] for own in fingerprints(DataSettings(dataset=dataset)).values()}) == 1
