"""Files that torch.save wrote: their tensors are read, and no program in them is executed."""

import copyreg
import io
import zipfile
from pathlib import Path

import pytest
import torch

from carmil.errors import CarmilError
from carmil.torch_files import MOST_INSTRUCTIONS, read_state_dicts

FORMATS = {"zip": {}, "old": {"_use_new_zipfile_serialization": False}}
EXTENSION = 0xF0F0F0
PLACE = "EVIL"  # the text that a program replaces


def touch(path):
    Path(path).touch()


class Trap:
    """Writes a file when it is made, and when its state is set."""

    def __new__(cls, path=None):
        if path is not None:
            touch(path)
        return super().__new__(cls)

    def __setstate__(self, path):
        touch(path)


def text(word: str) -> bytes:
    """Return the instruction that pushes a text."""
    return b"X" + len(word.encode()).to_bytes(4, "little") + word.encode()


def imported(name: str) -> bytes:
    return f"c{__name__}\n{name}\n".encode()


def programs(path: str) -> dict[str, bytes]:
    """Return programs that write the file `path` when they are executed, by the instruction that does it."""
    short = b"\x8c" + bytes([len(__name__)]) + __name__.encode() + b"\x8c\x05touch\x93"
    return {
        "REDUCE": imported("touch") + text(path) + b"\x85R",
        "REDUCE of os.system": b"cposix\nsystem\n" + text(f"touch '{path}'") + b"\x85R",
        "STACK_GLOBAL": short + text(path) + b"\x85R",
        "INST": b"(" + text(path) + f"i{__name__}\nTrap\n".encode(),
        "OBJ": b"(" + imported("Trap") + text(path) + b"o",
        "NEWOBJ": imported("Trap") + text(path) + b"\x85\x81",
        "NEWOBJ_EX": imported("Trap") + text(path) + b"\x85}\x92",
        "BUILD": imported("Trap") + b")\x81" + text(path) + b"b",
        "EXT4": b"\x84" + EXTENSION.to_bytes(4, "little") + text(path) + b"\x85R",
    }


def replaced(path: Path, old: bytes, new: bytes) -> None:
    """Replace bytes of the pickle in a file."""
    content = path.read_bytes()
    if not zipfile.is_zipfile(path):
        assert content.count(old) == 1
        path.write_bytes(content.replace(old, new))
        return
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in members if name.endswith("data.pkl"))
    assert members[name].count(old) == 1
    members[name] = members[name].replace(old, new)
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)


@pytest.fixture(params=FORMATS)
def save(request):
    return lambda value, path: torch.save(value, path, **FORMATS[request.param])


@pytest.fixture
def extension():
    copyreg.add_extension(__name__, "touch", EXTENSION)
    yield
    copyreg.remove_extension(__name__, "touch", EXTENSION)


def test_tensors_are_read_as_torch_wrote_them(tmp_path, save):
    rows = torch.arange(12.0).reshape(3, 4)
    state = {
        "plain": rows,
        "transposed": rows.T,
        "part": rows[1:, 2:],
        "whole numbers": torch.tensor([3, -1]),
        "half": torch.tensor([0.5, 2.0], dtype=torch.bfloat16),
        "one": torch.tensor(7.0),
        "none": torch.empty(0, 4),
        "truth": torch.tensor([True, False]),
        "learned": torch.nn.Parameter(torch.ones(2)),
    }
    save(state, tmp_path / "x.pt")
    found = read_state_dicts(tmp_path / "x.pt")
    assert list(found) == [""] and list(found[""]) == list(state)
    assert all(
        torch.equal(found[""][name], value) and found[""][name].dtype == value.dtype for name, value in state.items()
    )


def test_state_dicts_are_named_by_their_path_in_the_file_and_other_values_are_skipped(tmp_path, save):
    layer = torch.nn.Linear(2, 1)
    optimizer = {"state": {0: {"momentum": torch.ones(2)}}, "groups": [{"lr": 0.1}]}
    content = {"epoch": 3, "path": tmp_path, "net": {"model": layer.state_dict(), "rate": 0.1}, "optimizer": optimizer}
    save(content, tmp_path / "x.pt")
    found = read_state_dicts(tmp_path / "x.pt")
    assert list(found) == ["net.model"]
    assert torch.equal(found["net.model"]["weight"], layer.weight)


@pytest.mark.parametrize("instruction", programs(""))
def test_no_program_in_a_file_is_executed(instruction, tmp_path, save, extension):
    path, mark = tmp_path / "x.pt", tmp_path / "executed"
    save({"weights": {"w": torch.ones(2), "evil": PLACE}}, path)
    replaced(path, text(PLACE), programs(str(mark))[instruction])
    found = read_state_dicts(path)
    assert not mark.exists()
    assert list(found) == ["weights"] and torch.equal(found["weights"]["w"], torch.ones(2))
    torch.load(path, weights_only=False)
    assert mark.exists()  # so the program does something when it is executed


def test_program_in_place_of_the_whole_content_is_not_executed(tmp_path, save):
    mark = tmp_path / "executed"

    class Evil:
        def __reduce__(self):
            return touch, (str(mark),)

    save(Evil(), tmp_path / "x.pt")
    with pytest.raises(
        CarmilError, match=r"x\.pt holds no tensors under names: expected a state dict that torch\.save wrote"
    ):
        read_state_dicts(tmp_path / "x.pt")
    assert not mark.exists()


def test_truncated_files_are_refused_in_one_line(tmp_path, save):
    save({"weight": torch.ones(40, 40), "bias": torch.ones(40)}, tmp_path / "whole.pt")
    content = (tmp_path / "whole.pt").read_bytes()
    for length in [*range(0, len(content), 97), len(content) - 1]:
        (tmp_path / "cut.pt").write_bytes(content[:length])
        with pytest.raises(CarmilError) as refused:
            read_state_dicts(tmp_path / "cut.pt")
        assert str(refused.value).startswith(str(tmp_path / "cut.pt")) and "\n" not in str(refused.value)


def test_tensor_that_extends_beyond_its_stored_values_or_repeats_them_is_refused(tmp_path):
    shape = b"K\x02K\x03\x86"  # (2, 3), once as the size
    for other in (b"K\x07K\x03\x86", b"K\x02M\xff\xff\x86", b"K\x02J\xff\xff\xff\xff\x86"):
        torch.save({"w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "x.pt")
        replaced(tmp_path / "x.pt", shape, other)
        with pytest.raises(CarmilError, match="cannot be read"):
            read_state_dicts(tmp_path / "x.pt")
    torch.save({"w": torch.ones(1).expand(1000, 1000)}, tmp_path / "x.pt")
    with pytest.raises(CarmilError, match=r"a tensor of the shape \(1000, 1000\) in a storage of 1 values"):
        read_state_dicts(tmp_path / "x.pt")


def zip_of(path: Path, program: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", program)
    return path


@pytest.mark.parametrize(
    ("program", "reason"),
    {
        "a dictionary in itself": (b"\x80\x02}q\x00" + text("a") + b"h\x00s.", "holds no tensors under names"),
        "a key that takes forever to hash": (b"\x80\x02}" + b")" + b"2\x86" * 80 + b"K\x01s.", "holds no tensors"),
        "too many instructions": (b"\x80\x02" + b"N0" * MOST_INSTRUCTIONS + b"N.", "more than 1,000,000 instructions"),
        "more values than there are": (b"\x80\x02}" + b"0" * 9 + b".", "cannot be read"),
        "no end": (b"\x80\x02}", "cannot be read"),
    }.values(),
)
def test_pickle_programs_that_would_not_terminate_are_refused(program, reason, tmp_path):
    with pytest.raises(CarmilError, match=reason):
        read_state_dicts(zip_of(tmp_path / "x.pt", program))


def test_files_of_other_formats_are_refused(tmp_path):
    (tmp_path / "x.pt").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(CarmilError, match=r"x\.pt was not written by torch\.save"):
        read_state_dicts(tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "y.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02" + text("a" * 10**6) + b".")
    with pytest.raises(CarmilError, match=r"y\.pt: data\.pkl declares 1,000,008 bytes, but the file holds at most"):
        read_state_dicts(tmp_path / "y.pt")
    with pytest.raises(CarmilError, match="does not exist"):
        read_state_dicts(tmp_path / "z.pt")
