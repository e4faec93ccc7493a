"""DomainNet-126: its list files and the images they name."""

from pathlib import Path

import pytest

from data.make import make_domainnet126
from dpl.core.errors import DataError
from dpl.data import DataWarning, open_benchmark

quiet = pytest.mark.filterwarnings("ignore::dpl.data.DataWarning")


def error_of(name, root, **options):
    with pytest.raises(DataError) as caught:
        open_benchmark(name, root, **options)
    return str(caught.value)


@quiet
@pytest.mark.parametrize("line_end", ["\r\n", "\n"])
def test_domainnet(tmp_path, line_end):
    make_domainnet126(tmp_path, line_end=line_end)
    benchmark = open_benchmark("domainnet126", tmp_path)
    assert list(benchmark.domains) == ["clipart", "painting", "real", "sketch"]
    assert benchmark.classes == tuple(f"thing_{label:03d}" for label in range(6))
    images = benchmark["real"]
    assert len(images) == 18
    assert [Path(images.location(i)).parent.name for i in range(18)] == [images.classes[k] for k in images.labels]
    first = (tmp_path / "DomainNet-126" / "real_list.txt").read_text().split()[0]
    assert images.location(0).endswith(first)


def test_domainnet_warns_of_images_and_classes(tmp_path):
    make_domainnet126(tmp_path)
    with pytest.warns(DataWarning) as caught:
        open_benchmark("domainnet126", tmp_path)
    assert str(caught[0].message).startswith("DomainNet-126: clipart 18 instead of 18,523; painting 18")
    assert "6 instead of 126" in str(caught[1].message)


@quiet
def test_domainnet_lists_in_another_folder(tmp_path):
    make_domainnet126(tmp_path)
    lists = tmp_path / "elsewhere"
    lists.mkdir()
    for path in (tmp_path / "DomainNet-126").glob("*_list.txt"):
        path.rename(lists / path.name)
    assert "no list file" in error_of("domainnet126", tmp_path)
    assert len(open_benchmark("domainnet126", tmp_path, lists=lists, domains=["real"])) == 18


@quiet
def test_domainnet_that_is_half_copied(tmp_path):
    make_domainnet126(tmp_path)
    for path in sorted((tmp_path / "DomainNet-126" / "real" / "thing_002").glob("*.jpg"))[:2]:
        path.unlink()
    assert "2 of 18 listed images are missing, the first is real/thing_002/real_002_" in error_of(
        "domainnet126", tmp_path
    )


@quiet
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the list is empty"),
        ("real/thing_000/a.jpg\n", "line 1: 'real/thing_000/a.jpg'; expected '<domain>/<class>/<file> <label>'"),
        ("real/../secret.jpg 0\n", "line 1"),
        ("/etc/x.jpg 0\n", "line 1"),
        ("real/a/x.jpg 0\nreal/b/x.jpg 0\n", "is both 'a' and 'b'"),
        ("real/a/x.jpg 0\nreal/b/x.jpg 5\n", "gaps below 5"),
    ],
)
def test_domainnet_lists_that_are_wrong(tmp_path, text, message):
    make_domainnet126(tmp_path)
    (tmp_path / "DomainNet-126" / "real_list.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        open_benchmark("domainnet126", tmp_path, domains=["real"])
