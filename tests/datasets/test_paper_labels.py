from collections import Counter
from pathlib import Path

import pytest

from carmil.datasets.paper_cohorts import dataset_named
from carmil.datasets.paper_labels import LabelRow, PaperLabels, build_labels, labels_text
from carmil.errors import CarmilError

MAF = """#version gdc-1.0.0
Hugo_Symbol\tVariant_Classification\tTumor_Sample_Barcode
TP53\tMissense_Mutation\tTCGA-05-0001-01A-01D
TP53\tSilent\tTCGA-05-0002-01A-01D
KRAS\tMissense_Mutation\tTCGA-05-0002-01A-01D
EGFR\tIn_Frame_Del\tTCGA-05-0003-01A-01D
"""
REFERENCE = "test_001,Tumor,IDC,Macro\ntest_002,Normal,None,None\ntest_003,Normal,None,None\n"


@pytest.fixture
def build(tmp_path: Path):
    """Return a function that builds labels from tables given as text; a prefix such as "LUAD=" names a class."""

    def build_from_texts(name: str, *texts: str, label: str | None = None) -> PaperLabels:
        words = []
        for i, text in enumerate(texts):
            one, sign, rest = text.partition("=")
            path = tmp_path / f"table{i}.csv"
            path.write_text(rest if sign else text)
            words.append(f"{one}={path}" if sign else str(path))
        return build_labels(dataset_named(name), words, label=label)

    return build_from_texts


def labels(table: PaperLabels) -> dict[str, str]:
    return {line.slide: line.label for line in table.lines}


def test_patient_table_without_a_header_keeps_its_first_row(build) -> None:
    table = build("brca", "TCGA-E2-A154,IDC\nTCGA-AO-A0J6,ILC\n")
    assert table.lines == (
        LabelRow("TCGA-E2-A154", "TCGA-E2-A154", "IDC"),
        LabelRow("TCGA-AO-A0J6", "TCGA-AO-A0J6", "ILC"),
    )


def test_slide_ids_are_kept_and_sample_ids_become_patient_ids(build) -> None:
    table = build(
        "brca",
        "slide,label\nTCGA-E2-A154-01Z-00-DX1.0D28.svs,IDC\nTCGA-AO-A0J6-01A,ILC\n",
    )
    assert table.lines == (
        LabelRow("TCGA-E2-A154-01Z-00-DX1.0D28", "TCGA-E2-A154", "IDC"),
        LabelRow("TCGA-AO-A0J6", "TCGA-AO-A0J6", "ILC"),
    )


def test_columns_of_a_clinical_table_are_recognised_by_content(build) -> None:
    text = (
        "#Patient Identifier\tSex\tHistology\n#STRING\tSTRING\tSTRING\nPATIENT_ID\tSEX\tHISTOLOGICAL\n"
        "TCGA-E2-A154\tFemale\tInfiltrating Ductal Carcinoma\nTCGA-AO-A0J6\tFemale\tInfiltrating Lobular Carcinoma\n"
        "TCGA-AO-A0J7\tMale\tMixed Histology\nNA\tMale\tInfiltrating Ductal Carcinoma\n"
    )
    table = build("brca", text)
    assert labels(table) == {"TCGA-E2-A154": "IDC", "TCGA-AO-A0J6": "ILC"}
    assert "table0.csv: ids from column 'PATIENT_ID', labels from 'HISTOLOGICAL'" in table.notes
    assert "table0.csv: 1 row of none of the classes left out ('Mixed Histology' 1)" in table.notes
    assert "table0.csv: 1 row without an id in column 'PATIENT_ID' left out" in table.notes


def test_table_of_one_class_is_accepted_if_the_name_of_the_class_is_given(build) -> None:
    table = build("nsclc", "LUAD=case\nTCGA-05-0001\nTCGA-05-0002\n", "lusc=case\nTCGA-18-0003\n")
    assert labels(table) == {"TCGA-05-0001": "LUAD", "TCGA-05-0002": "LUAD", "TCGA-18-0003": "LUSC"}


def test_maf_labels_mutated_patients_and_ignores_silent_mutations(build) -> None:
    assert labels(build("luad_tp53", MAF)) == {
        "TCGA-05-0001": "1 mutated",
        "TCGA-05-0002": "0 wild type",
        "TCGA-05-0003": "0 wild type",
    }


def test_case_list_limits_labels_to_sequenced_patients(build) -> None:
    table = build("luad_tp53", MAF, "case\nTCGA-05-0001\nTCGA-05-0009\n")
    assert labels(table) == {"TCGA-05-0001": "1 mutated", "TCGA-05-0009": "0 wild type"}
    assert any("2 cases of the mutation table are in no list" in line for line in table.notes)


def test_mutations_of_one_gene_without_a_case_list_raise_an_error(build) -> None:
    only = "\n".join(
        line for line in MAF.splitlines() if "KRAS" not in line and "EGFR" not in line and "Silent" not in line
    )
    with pytest.raises(CarmilError, match="give a list of all sequenced cases as well"):
        build("luad_tp53", only)


def test_cbioportal_gene_column_is_read(build) -> None:
    text = "STUDY_ID\tSAMPLE_ID\tTP53\nluad\tTCGA-05-0001-01\tR273H\nluad\tTCGA-05-0002-01\tWT\nluad\tTCGA-05-0003-01\tNS\n"
    assert labels(build("luad_tp53", text)) == {"TCGA-05-0001": "1 mutated", "TCGA-05-0002": "0 wild type"}


def test_two_columns_of_barcodes_and_status_give_tp53_labels(build) -> None:
    assert labels(build("luad_tp53", "TCGA-05-0001,mut\nTCGA-05-0002,wt\n")) == {
        "TCGA-05-0001": "1 mutated",
        "TCGA-05-0002": "0 wild type",
    }


def test_original_bracs_table_gives_types_patients_and_official_split(build) -> None:
    text = (
        "WSI Filename,Patient Id,WSI label,Set\nBRACS_1,7,FEA,Training\nBRACS_2,7,ADH,Training\nBRACS_3,8,N,Testing\n"
    )
    assert build("bracs", text).lines == (
        LabelRow("BRACS_1", "7", "4 FEA", "train"),
        LabelRow("BRACS_2", "7", "3 ADH", "train"),
        LabelRow("BRACS_3", "8", "0 N", "test"),
    )


def test_bracs_class_numbers_use_the_bracs_order_and_are_noted(build) -> None:
    table = build("bracs", "slide_id,split,label\nBRACS_1,train,3\nBRACS_2,val,4\nBRACS_3,test,0\n")
    assert labels(table) == {"BRACS_1": "4 FEA", "BRACS_2": "3 ADH", "BRACS_3": "0 N"}
    assert any("3 is FEA and 4 is ADH" in line for line in table.notes)


def test_bracs_table_without_a_split_raises_an_error(build) -> None:
    with pytest.raises(CarmilError, match="no column has train, val or test"):
        build("bracs", "slide,label\nBRACS_1,N\nBRACS_2,IC\n")


def test_camelyon16_labels_come_from_slide_names_and_the_test_reference(build) -> None:
    table = build("camelyon16", "slide\nnormal_001.tif\ntumor_001.tif\n", REFERENCE)
    assert [(line.slide, line.label, line.split) for line in table.lines] == [
        ("normal_001", "normal", "train"),
        ("tumor_001", "tumor", "train"),
        ("test_001", "tumor", "test"),
        ("test_002", "normal", "test"),
        ("test_003", "normal", "test"),
    ]


def test_conflicting_label_columns_raise_an_error_naming_them(build) -> None:
    text = "case,first,second\nTCGA-E2-A154,IDC,ILC\nTCGA-AO-A0J6,ILC,IDC\n"
    with pytest.raises(CarmilError, match="'first' and 'second' could both be the label"):
        build("brca", text)
    assert labels(build("brca", text, label="Second"))["TCGA-E2-A154"] == "ILC"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("brca", "slide,label\nBRACS_1,IDC\n", "no column with ids of TCGA-BRCA, such as TCGA-E2-A154"),
        ("brca", "slide,label\nTCGA-E2-A154,one\n", "no column with words for IDC, ILC"),
        ("brca", "slide,label\nTCGA-E2-A154,IDC\n", "1 slide of 1 class of TCGA-BRCA; expected at least two"),
        ("brca", "TCGA-E2-A154,IDC\nTCGA-E2-A154,ILC\n", "TCGA-E2-A154 is 'IDC'  and 'ILC' : expected one"),
        ("camelyon16", "slide,x\nnormal_001,\ntest_001,\n", "no column with words for normal, tumor"),
    ],
)
def test_unusable_label_tables_raise_an_error(build, name: str, text: str, words: str) -> None:
    with pytest.raises(CarmilError, match=words):
        build(name, text)


def test_labels_csv_has_a_split_column_only_if_rows_have_a_split() -> None:
    assert (
        labels_text([LabelRow("a", "p", "N, or so"), LabelRow("b", "p", "IC")])
        == 'slide,patient,label\na,p,"N, or so"\nb,p,IC\n'
    )
    assert labels_text([LabelRow("a", "p", "N", "train")]) == "slide,patient,label,split\na,p,N,train\n"


def test_published_tables_have_the_class_counts_of_the_paper_except_one_bracs_slide(shared_data: Path) -> None:
    def counts(name: str, file: str) -> Counter[str]:
        return Counter(
            line.label for line in build_labels(dataset_named(name), [str(shared_data / "tables" / file)]).lines
        )

    def of_paper(name: str) -> dict[str, int]:
        return {one.name: one.slides for one in dataset_named(name).classes}

    assert counts("brca", "tcga_brca_rrt.csv") == of_paper("brca")
    assert counts("camelyon16", "camelyon16_acmil.csv") == of_paper("camelyon16")
    assert counts("bracs", "bracs_acmil.csv") - Counter(of_paper("bracs")) == {"2 UDH": 1}


def test_published_bracs_table_has_the_official_split(shared_data: Path) -> None:
    table = build_labels(dataset_named("bracs"), [str(shared_data / "tables" / "bracs_acmil.csv")])
    assert Counter(line.split for line in table.lines) == {"train": 395, "val": 65, "test": 87}
