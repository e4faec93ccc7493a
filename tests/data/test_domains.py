"""PACS, VLCS, OfficeHome and TerraIncognita, whole and half copied."""

import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.make import make_class_folders, make_office_home, make_pacs, make_terra_incognita, make_vlcs
from dpl.core.errors import DataError, SettingError
from dpl.data import DataWarning, open_benchmark
from dpl.data.facts import DOMAIN_FOLDERS

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
quiet = pytest.mark.filterwarnings("ignore::dpl.data.DataWarning")


def error_of(name, root, **options):
    with pytest.raises(DataError) as caught:
        open_benchmark(name, root, **options)
    return str(caught.value)


@quiet
@pytest.mark.parametrize(
    ("name", "make", "folder", "per_domain"),
    [
        ("pacs", make_pacs, "PACS", 21),
        ("vlcs", make_vlcs, "VLCS", 15),
        ("office_home", make_office_home, "office_home", 65),
        ("terra_incognita", make_terra_incognita, "terra_incognita", 20),
    ],
)
def test_domain_folders(tmp_path, name, make, folder, per_domain):
    make(tmp_path)
    facts = DOMAIN_FOLDERS[name.replace("_", "")]
    for root in (tmp_path, tmp_path / folder):
        benchmark = open_benchmark(name, root)
        assert list(benchmark.domains) == list(facts.counts) == sorted(facts.counts)
        assert benchmark.classes == facts.classes == tuple(sorted(facts.classes))
        assert [len(images) for images in benchmark.domains.values()] == [per_domain] * 4
    for images in benchmark.domains.values():
        assert all(
            images.classes[label] == Path(images.location(i)).parent.name for i, label in enumerate(images.labels)
        )
        paths = [images.location(i) for i in range(len(images))]
        assert paths == sorted(paths)


@quiet
def test_office_home_under_its_other_names(tmp_path):
    make_office_home(tmp_path, folder="OfficeHome", real_world="RealWorld")
    benchmark = open_benchmark("office_home", tmp_path)
    assert list(benchmark.domains) == ["Art", "Clipart", "Product", "Real World"]
    assert "RealWorld" in benchmark["Real World"].location(0)


def test_counts_that_differ_are_named_once(tmp_path):
    make_pacs(tmp_path)
    with pytest.warns(DataWarning, match="PACS: art_painting 21 instead of 2,048; cartoon 21") as caught:
        open_benchmark("pacs", tmp_path)
    assert len(caught) == 1


def test_terra_incognita_explains_its_two_versions(tmp_path):
    make_terra_incognita(tmp_path)
    with pytest.warns(DataWarning, match=r"24,788 images; the download offered since then holds 24,330"):
        open_benchmark("terra_incognita", tmp_path)


@quiet
def test_chosen_domains_keep_the_benchmarks_order(tmp_path):
    make_pacs(tmp_path)
    shutil.rmtree(tmp_path / "PACS" / "cartoon")
    chosen = open_benchmark("pacs", tmp_path, domains=["Sketch", "art painting"])
    assert list(chosen.domains) == ["art_painting", "sketch"]
    with pytest.raises(SettingError, match=r"PACS has no domain 'skecth'\. Did you mean 'sketch'"):
        open_benchmark("pacs", tmp_path, domains=["skecth"])


@quiet
def test_half_copied_domain_folders(tmp_path):
    make_pacs(tmp_path)
    shutil.rmtree(tmp_path / "PACS" / "sketch" / "person")
    message = error_of("pacs", tmp_path)
    assert "sketch: the class folders person are missing" in message
    assert "    art_painting/\n      dog/*.jpg" in message
    (tmp_path / "PACS" / "sketch" / "person").mkdir()
    assert "sketch: no image in the class folders person" in error_of("pacs", tmp_path)
    shutil.rmtree(tmp_path / "PACS" / "photo")
    assert "the domains photo are missing" in error_of("pacs", tmp_path)


def test_a_folder_that_is_no_class_is_left_out_with_a_warning(tmp_path):
    make_pacs(tmp_path)
    make_class_folders(tmp_path / "PACS" / "photo", ["zebra"])
    with pytest.warns(DataWarning, match="photo: zebra left out"):
        benchmark = open_benchmark("pacs", tmp_path)
    assert len(benchmark["photo"]) == 21


@quiet
def test_benchmark_images_are_read_as_stored(tmp_path):
    make_pacs(tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 6
    first = tmp_path / "PACS" / "photo" / "dog" / "a.jpg"
    Image.new("RGB", (20, 10)).save(first, exif=exif)
    assert open_benchmark("pacs", tmp_path)["photo"].load(0).size == (20, 10)


@pytest.mark.shared
@pytest.mark.skipif(not (SHARED / "PACS").is_dir(), reason="no copy of PACS beside the checkout")
def test_the_real_pacs():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        benchmark = open_benchmark("pacs", SHARED)
    counts = {domain: len(images) for domain, images in benchmark.domains.items()}
    assert counts == {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}
    assert benchmark.classes == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    assert np.bincount(benchmark["sketch"].labels).tolist() == [772, 740, 753, 608, 816, 80, 160]
    assert benchmark["photo"].load(0).size == (160, 160)
