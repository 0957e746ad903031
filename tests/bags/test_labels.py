from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from carmil import table_files
from carmil.bags.labels import LabelTable, bare_id, match, read_labels
from carmil.errors import CarmilError
from carmil.table_files import read_cells, read_table

PLAIN = "case_id,slide_id,label\np1,a,normal\np1,b,normal\np2,c,tumor\np3,d,tumor\n"


@pytest.fixture
def table(tmp_path):
    def write(content: str | bytes, name: str = "labels.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def test_comments_above_the_header_are_skipped_and_line_numbers_preserved(table):
    frame = read_table(table("#Patient\tSubtype\n#STRING\tSTRING\nslide\tlabel\na\tnormal\nb\ttumor\n"))
    assert list(frame["slide"]) == ["a", "b"]
    assert list(frame.index) == [4, 5]
    assert frame.attrs["notes"] == ("labels.csv: 2 comment lines at its top are left out",)
    assert list(read_table(table("#version 2.4\nslide\tlabel\na\tx\n", "some.maf"))["slide"]) == ["a"]


def test_single_first_line_starting_with_hash_is_read_as_the_header(table):
    assert list(read_table(table("#,slide,label\n1,a,normal\n2,b,tumor\n"))["slide"]) == ["a", "b"]


def test_read_cells_keeps_the_first_line_as_data(table):
    assert read_cells(table("test_001,Tumor,None,None\ntest_002,Normal,None,None\n"))[0][:2] == ["test_001", "Tumor"]


def test_plain_label_table_is_read_unchanged(table):
    labels = read_labels(table(PLAIN))
    assert labels.slides == ("a", "b", "c", "d")
    assert labels.patients == ("p1", "p1", "p2", "p3")
    assert labels.labels == ("normal", "normal", "tumor", "tumor")
    assert labels.classes == ("normal", "tumor")
    assert labels.sites is None
    assert labels.official is None


def test_every_guessed_column_and_class_is_noted(table):
    assert read_labels(table(PLAIN)).notes == (
        "slide column: 'slide_id' (guessed)",
        "patient column: 'case_id' (guessed)",
        "label column: 'label' (guessed)",
        "classes: 'normal' (2 slides), 'tumor' (2 slides)",
        "positive class: 'tumor' (guessed: the last in the alphabet; `carmil train --positive` names the other)",
    )


def test_columns_specified_by_the_user_are_not_guessed(table):
    labels = read_labels(table(PLAIN), slide="slide_id", patient="case_id", label="label", positive="normal")
    assert labels.notes == ("classes: 'tumor' (2 slides), 'normal' (2 slides)",)
    assert labels.classes == ("tumor", "normal")


@pytest.mark.parametrize(
    "content",
    [
        PLAIN.encode("utf-8-sig"),
        PLAIN.encode("utf-16"),
        PLAIN.replace(",", ";").encode(),
        PLAIN.replace(",", "\t").encode(),
        PLAIN.replace("\n", "\r\n").encode(),
        PLAIN.replace("\n", "\r").encode(),
        PLAIN.replace("\n", "\n\n").encode(),
        PLAIN.replace("\n", ",,\n").encode(),
        PLAIN.replace("normal", '"normal"').replace(",", " , ").replace(' "normal"', '"normal"').encode(),
        (b",case_id,slide_id,label\n0,p1,a,normal\n1,p1,b,normal\n2,p2,c,tumor\n3,p3,d,tumor\n"),
        PLAIN.replace("case_id,slide_id,label", "Patient ID,WSI,Diagnosis").encode(),
        PLAIN.replace("slide_id", "FILENAME").replace(",a,", ",a.h5,").replace(",d,", ",/data/d.SVS,").encode(),
    ],
    ids=[
        *("byte order mark", "utf-16", "semicolons", "tabs", "crlf", "cr", "blank lines", "empty cells behind"),
        *("quotes and blanks", "running number", "other names", "extensions and folders"),
    ],
)
def test_label_table_is_read_the_same_in_any_encoding_or_format(table, content):
    formatted, plain = read_labels(table(content)), read_labels(table(PLAIN, "plain.csv"))
    for part in ("slides", "patients", "labels", "classes"):
        assert getattr(formatted, part) == getattr(plain, part)


def test_label_table_is_read_from_parquet(table, tmp_path):
    frame = pd.DataFrame(
        {"case_id": ["p1", "p1", "p2", "p3"], "slide_id": ["a", "b", "c", "d"], "label": [0.0, 0.0, 1.0, None]}
    )
    frame.to_parquet(tmp_path / "labels.parquet")
    labels = read_labels(tmp_path / "labels.parquet")
    assert (labels.slides, labels.labels) == (("a", "b", "c"), ("0", "0", "1"))
    assert "1 slide has an empty label in column 'label' (guessed) and is left out (line 4)" in labels.notes
    assert "labels are whole numbers written like '0.0': read without the point" in labels.notes


def test_cells_are_read_as_text_without_conversion(table):
    frame = read_table(table("slide,label,note\n00123,NA,\n1e5,None,nan\n"))
    assert frame.to_dict("list") == {"slide": ["00123", "1e5"], "label": ["NA", "None"], "note": ["", "nan"]}
    assert list(frame.index) == [2, 3]


def test_latin_1_table_is_read_and_noted(table):
    labels = read_labels(table(PLAIN.replace("tumor", "bösartig").encode("latin-1")))
    assert labels.classes == ("bösartig", "normal")
    assert "labels.csv is not UTF-8: read as Latin-1; check ids and labels with special letters" in labels.notes


def test_equivalent_unicode_spellings_give_the_same_id():
    assert bare_id("Mu\u0308ller_1.svs") == bare_id("M\u00fcller_1.h5") == "M\u00fcller_1"


@pytest.mark.parametrize(
    ("written", "bare"),
    [
        ("s1.svs", "s1"),
        ("s1.ome.tiff", "s1"),
        ("s1.svs.h5", "s1"),
        ("TCGA-3C-AALI-01Z-00-DX1.F6E9.svs", "TCGA-3C-AALI-01Z-00-DX1.F6E9"),
        ("C:\\slides\\s1.ndpi", "s1"),
        ("s1.2", "s1.2"),
        (".h5", ".h5"),
    ],
)
def test_bare_id_has_no_folder_and_no_extension(written, bare):
    assert bare_id(written) == bare


def test_classes_are_sorted_numerically_or_alphabetically(table):
    rows = "".join(f"s{i},{i % 11}\n" for i in range(33))
    assert read_labels(table("slide,label\n" + rows)).classes == tuple(str(i) for i in range(11))
    words = "slide,label\na,b\nb,b\nc,C\nd,C\ne,a\nf,a\n"
    assert read_labels(table(words)).classes == ("a", "b", "C")


def test_rows_without_a_label_are_skipped_and_counted(table):
    labels = read_labels(table(PLAIN + "p4,e,\np5,f,NaN\n"))
    assert labels.slides == ("a", "b", "c", "d")
    assert "2 slides have an empty label in column 'label' (guessed) and are left out (lines 6, 7)" in labels.notes


def test_repeated_slide_is_counted_once(table):
    labels = read_labels(table(PLAIN + "p3,d.svs,tumor\n"))
    assert labels.slides == ("a", "b", "c", "d")
    assert "1 row repeats a slide and is counted once ('d')" in labels.notes


def test_patient_with_two_labels_is_noted(table):
    labels = read_labels(table(PLAIN + "p1,e,tumor\n"))
    assert "1 patient has slides of different labels ('p1')" in labels.notes


def test_without_a_patient_column_each_slide_is_its_own_patient(table):
    labels = read_labels(table("slide,label\na,0\nb,1\nc,1\n"))
    assert labels.patients == labels.slides
    assert "no patient column: each slide is its own patient" in labels.notes


def test_possible_patient_columns_are_listed_in_a_warning(table):
    labels = read_labels(table("slide,owner,age,label\na,p,30,0\nb,p,30,1\n"))
    assert (
        "WARNING: no patient column: each slide is its own patient; is it 'owner' or 'age'? Name it with --patient"
        in labels.notes
    )


def test_only_id_column_is_used_as_the_slide_column(table):
    labels = read_labels(table("PATIENT,label\na,0\nb,1\nc,1\n"))
    assert labels.slides == labels.patients == ("a", "b", "c")
    assert "slide column: 'PATIENT', the only column of ids; each id is its own patient" in labels.notes


def test_patients_are_read_from_tcga_barcodes_without_a_patient_column(table):
    rows = "TCGA-A2-A0CM-01Z-00-DX1,0\nTCGA-A2-A0CM-01Z-00-DX2,0\nTCGA-3C-AALI-01Z-00-DX1,1\n"
    labels = read_labels(table("slide_id,label\n" + rows), site="tcga")
    assert labels.patients == ("TCGA-A2-A0CM", "TCGA-A2-A0CM", "TCGA-3C-AALI")
    assert labels.sites == ("A2", "A2", "3C")
    assert "no patient column: patients are read from the TCGA barcodes ('TCGA-A2-A0CM')" in labels.notes


def test_sites_and_official_split_are_read_from_their_columns(table):
    content = "slide,label,hospital,split\na,0,X,train\nb,1,Y,Val\nc,1,Y,\n"
    labels = read_labels(table(content), site="hospital")
    assert labels.sites == ("X", "Y", "Y")
    assert labels.official == ("train", "Val", "")


def test_column_named_set_without_split_values_is_not_an_official_split(table):
    assert read_labels(table("slide,label,set\na,0,TCGA\nb,1,CPTAC\nc,1,CPTAC\n")).official is None


def test_second_possible_slide_column_is_noted(table):
    labels = read_labels(table("slide_id,image_id,label\na,1,0\nb,2,1\nc,3,1\n"))
    assert labels.slides == ("a", "b", "c")
    assert "slide column: 'slide_id' (guessed; 'image_id' would do too)" in labels.notes


def test_equivalent_second_label_column_is_noted(table):
    labels = read_labels(table("slide,label,diagnosis\na,0,normal\nb,1,tumor\nc,1,tumor\n"))
    assert labels.labels == ("0", "1", "1")
    assert "label column: 'label' (guessed; 'diagnosis' would do too)" in labels.notes


def test_only_remaining_column_is_used_as_the_label(table):
    labels = read_labels(table("slide_id,HRD\na,low\nb,high\nc,high\n"))
    assert labels.labels == ("low", "high", "high")
    assert "label column: 'HRD' (guessed)" in labels.notes


def test_column_names_match_ignoring_case_and_spacing(table):
    assert read_labels(table(PLAIN.replace("label", "Sub Type")), label="sub_type").classes == ("normal", "tumor")


def test_specified_label_column_takes_precedence_over_a_column_called_label(table):
    content = "slide,label,site,er\na,0,X,neg\nb,0,Y,pos\nc,1,Y,pos\n"
    labels = read_labels(table(content), label="er", site="site")
    assert (labels.labels, labels.sites) == (("neg", "pos", "pos"), ("X", "Y", "Y"))


def lines(header: str, rows: int, row: str) -> str:
    return header + "\n" + "".join(row.format(i=i) + "\n" for i in range(rows))


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ("", {}, "is empty"),
        (" \n\n", {}, "is empty"),
        ("slide,label\n", {}, "has a header but no rows"),
        (b"PK\x03\x04rest", {}, "is a spreadsheet; save it as CSV"),
        (b"\x89HDF\r\n\x1a\n\0\0", {}, "is not a text file"),
        (b"PAR1 and then nonsense", {}, "cannot be read (ArrowInvalid: Parquet"),
        ("slide,label\na,0\nb,1,2\n", {}, "line 3 has 3 cells, the header 2"),
        ("slide,label,site\na,0\n", {}, "line 2 has 2 cells, the header 3"),
        ('slide,label\n"a,0\nb,1\n', {}, "cannot be read"),
        ("slide,label,label\na,0,1\n", {}, "column 'label' appears twice"),
        (
            PLAIN,
            {"label": "lable"},
            "unknown label column 'lable'; did you mean 'label'? expected one of case_id, label",
        ),
        (PLAIN, {"slide": "wsi"}, "unknown slide column 'wsi'"),
        (PLAIN, {"site": "tcga"}, "slide 'a' in line 2 is not a TCGA barcode"),
        (PLAIN, {"label": "slide_id", "slide": "slide_id"}, "cannot be both id and label"),
        (PLAIN, {"positive": "tumour"}, "unknown positive class 'tumour'; did you mean 'tumor'?"),
        (PLAIN + "p4,e,other\n", {"positive": "tumor"}, "has 3 classes: a positive class is for two classes only"),
        (PLAIN + "p3,d,normal\n", {}, "slide 'd' has label 'tumor' in line 5 and 'normal' in line 6"),
        (PLAIN + "p4,d,tumor\n", {}, "slide 'd' has patient 'p3' in line 5 and 'p4' in line 6"),
        (PLAIN + "p4,,tumor\n", {}, "column 'slide_id' has no id in line 6"),
        (PLAIN + ",e,tumor\n", {}, "column 'case_id' has no id in line 6"),
        (PLAIN + f"p4,{'e' * 256},tumor\n", {}, "in line 6, column 'slide_id', has 256 bytes; expected at most 255"),
        (PLAIN + "p4,e,Tumor\n", {}, "labels 'Tumor' and 'tumor', two spellings of the same class"),
        ("slide,label\na,1\nb,01\nc,2\nd,2\n", {}, "labels '01' and '1', two spellings of the same class"),
        ("slide,label\na,\nb,NA\n", {}, "has no label in any of its 2 rows"),
        ("slide,label\na,0\nb,0\n", {}, "has one class only, '0'"),
        (lines("slide,label", 40, "s{i},{i}.5"), {}, "looks like a quantity"),
        (lines("slide,age", 150, "s{i},{i}"), {}, "not classes: predict the number with --target COLUMN"),
        (lines("slide,label", 101, "s{i},name {i}"), {}, "has 101 different labels for 101 slides"),
        (lines("slide,label", 5, "s{i},name {i}"), {}, "has 5 different labels for 5 slides"),
        ("slide,os_months,os_event\na,3.1,1\nb,2,0\n", {}, "look like survival, and there is no label column"),
        ("slide,a,b\na,0,1\nb,1,0\n", {}, "no label column found among 'slide', 'a', 'b'; name it with --label"),
        ("slide,label,target\na,0,1\nb,1,1\nc,1,0\n", {}, "'label' and 'target' could both be the label"),
        ("one,two,label\na,b,0\na,c,1\n", {}, "no column of slide ids found among 'one', 'two', 'label'"),
        ("slide,label,site\na,0,X\nb,1,\n", {"site": "site"}, "column 'site' has no site in line 3"),
    ],
)
def test_invalid_label_table_raises_an_error_of_one_line(table, content, options, words):
    path = table(content)
    with pytest.raises(CarmilError) as raised:
        read_labels(path, **options)
    assert words in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_path_that_is_not_a_table_raises_an_error(tmp_path):
    (tmp_path / "labels.xlsx").write_bytes(b"anything")
    for path, words in (
        (tmp_path / "none.csv", "does not exist"),
        (tmp_path, "is a folder"),
        (tmp_path / "labels.xlsx", "save it as CSV"),
    ):
        with pytest.raises(CarmilError, match=words):
            read_table(path)


def labelled(*slides: str, patients: tuple[str, ...] = ()) -> LabelTable:
    labels = tuple("ab"[i % 2] for i in range(len(slides)))
    return LabelTable(Path("labels.csv"), slides, patients or slides, labels, ("a", "b"))


def test_match_returns_labels_in_bag_order():
    result = match(labelled("s1", "s2", "s3", patients=("p1", "p1", "p2")), ["s3.h5", "s1", "other"])
    assert result.bags == (0, 1)
    assert result.slides == ("s3", "s1")
    assert result.patients == ("p2", "p1")
    assert result.labels == (0, 0)
    assert result.unlabelled == ("other",)
    assert result.missing == ("s2",)
    assert "1 of 3 bags has no label and is left out ('other')" in result.notes
    assert "WARNING: no bag has the label 'b'" in result.notes


def test_losing_more_than_half_of_the_bags_is_a_warning():
    result = match(labelled("s1", "s2"), ["s1", "s2", "x", "y", "z"])
    assert (
        "WARNING: more than half are lost: 3 of 5 bags have no label and are left out ('x', 'y' and 1 more)"
        in result.notes
    )


def test_ids_saved_as_floats_match_their_bags():
    result = match(labelled("12.0", "13.0", "x"), ["12", "13"])
    assert (result.slides, result.patients, result.labels) == (("12", "13"), ("12", "13"), (0, 1))
    assert "2 slide ids end in '.0' (saved as numbers): '12.0' read as '12'" in result.notes
    assert result.missing == ("x",)


def test_nearly_equal_ids_are_listed_in_a_warning():
    result = match(labelled("Bag 5", "bag06", "bag-7"), ["bag_05", "bag06", "bag08"])
    assert (
        "WARNING: 1 label has no bag, and a bag with nearly the same id has no label: 'Bag 5' in the table, 'bag_05' among the "
        "bags; write them alike"
    ) in result.notes
    assert len(result.notes) == 3 + 1  # unlabelled bags, labels without a bag, and a class without a bag


def test_table_of_patients_labels_all_their_slides():
    result = match(
        labelled("TCGA-1", "TCGA-1-2", "TCGA-3"), ["TCGA-1-DX1", "TCGA-1-2.DX1", "TCGA-1_DX2", "TCGA-33-DX1"]
    )
    assert result.slides == ("TCGA-1-DX1", "TCGA-1-2.DX1", "TCGA-1_DX2")
    assert result.patients == ("TCGA-1", "TCGA-1-2", "TCGA-1")
    assert result.labels == (0, 1, 0)
    assert result.unlabelled == ("TCGA-33-DX1",)
    assert result.missing == ("TCGA-3",)
    assert "the table lists patients: the names of 3 bags begin with 2 of its ids" in result.notes


@pytest.mark.parametrize(
    ("bags", "words"),
    [
        (["x", "y"], "the column of slides has ids like '1', the bags like 'x'; expected equal ids"),
        (["001", "002"], "has lost its leading zeros: save its ids as text"),
        (["1.h5", "1.pt"], "bags '1.h5' and '1.pt' are both slide '1'"),
        ([], "no bags to match"),
    ],
)
def test_bags_that_do_not_match_the_table_raise_an_error(bags, words):
    with pytest.raises(CarmilError) as raised:
        match(labelled("1", "2"), bags)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_bracs_table_has_seven_classes_and_an_official_split(shared_data):
    labels = read_labels(shared_data / "tables" / "bracs_acmil.csv")
    assert len(labels.slides) == len(set(labels.patients)) == 547
    assert labels.classes == tuple("0123456")
    assert labels.official is not None
    assert [labels.official.count(part) for part in ("train", "val", "test")] == [395, 65, 87]
    assert "split column: 'split_info' (guessed)" in labels.notes


def test_camelyon_table_has_patients_with_two_slides_and_two_labels(shared_data):
    labels = read_labels(shared_data / "tables" / "camelyon16_acmil.csv")
    assert (len(labels.slides), len(set(labels.patients))) == (399, 362)
    assert (labels.labels.count("0"), labels.labels.count("1")) == (239, 160)
    assert any(sentence.startswith("10 patients have slides of different labels") for sentence in labels.notes)


def test_table_without_a_header_keeps_its_first_row(shared_data):
    labels = read_labels(shared_data / "tables" / "tcga_brca_rrt.csv", site="tcga", positive="ILC")
    assert labels.slides[0] == "TCGA-E2-A154"
    assert (labels.labels.count("IDC"), labels.labels.count("ILC")) == (779, 198)
    assert labels.sites is not None and labels.sites[0] == "E2"
    assert "tcga_brca_rrt.csv has no header line: its two columns are taken as slide and label" in labels.notes
    result = match(labels, ["TCGA-E2-A154-01Z-00-DX1.0BD4.svs", "TCGA-LL-A5YM-01Z-00-DX1"])
    assert (result.patients, result.labels) == (("TCGA-E2-A154", "TCGA-LL-A5YM"), (0, 0))


@pytest.mark.finding(n=14)
def test_parquet_table_with_invalid_utf8_raises_an_error(tmp_path):
    path = tmp_path / "labels.parquet"
    words = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")])
    pq.write_table(pa.table({"slide": words, "label": ["b"]}), path)
    with pytest.raises(CarmilError, match=r"labels\.parquet cannot be read .ArrowInvalid: .*UTF8"):
        read_labels(path)


@pytest.mark.finding(n=14)
def test_table_with_too_many_columns_raises_an_error(table, monkeypatch):
    monkeypatch.setattr(table_files, "MOST_COLUMNS", 3)
    with pytest.raises(CarmilError, match=r"labels\.csv: has 4 columns; expected at most 3"):
        read_labels(table("slide,label,a,b\ns0,x,1,2\n"))
