import pytest

from carmil.files import safe_name


def test_an_ordinary_name_stays_as_it_is():
    assert safe_name("TCGA-AA-3489-01Z-00-DX1.4f9e 2") == "TCGA-AA-3489-01Z-00-DX1.4f9e 2"


@pytest.mark.parametrize("name", ["a/b", "../up", "..", ".hidden", "", "a\nb", "é", "x" * 300, "con:1", "summary"])
def test_any_name_becomes_one_that_a_folder_takes_and_no_two_the_same(name, tmp_path):
    safe = safe_name(name, taken=("summary",))
    assert safe != safe_name(name + "'", taken=("summary",))
    assert safe not in ("summary", name)
    (tmp_path / f"{safe}.parquet").write_text("here")
    assert [path.name for path in tmp_path.iterdir()] == [f"{safe}.parquet"]
