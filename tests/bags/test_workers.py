import os
import subprocess
import sys
import time

import pytest

from carmil.bags import workers
from carmil.bags.sources import Source
from carmil.bags.workers import in_parallel
from carmil.errors import CarmilError


@pytest.fixture
def jobs(tmp_path):
    def with_argument(argument):
        return [(Source(f"{i}", tmp_path / f"{i}.h5", "h5"), (argument,)) for i in range(2)]

    return with_argument


def test_a_reader_that_never_comes_back_is_named(jobs, monkeypatch):
    monkeypatch.setattr(workers, "_PATIENCE", 2)
    with pytest.raises(CarmilError, match=r"no file could be read for 2 s; one of these is damaged: .*0\.h5"):
        list(in_parallel(time.sleep, jobs(60), 2))


def test_a_reader_that_dies_is_named(jobs):
    with pytest.raises(
        CarmilError, match=r"a process that reads files died: .*damaged: .*\.h5; what is packed is kept"
    ):
        list(in_parallel(os._exit, jobs(1), 2))


def test_a_script_without_a_main_of_its_own_is_told_what_to_do(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from carmil.bags.sources import Source\n"
        "from carmil.bags.workers import in_parallel\n"
        "print(list(in_parallel(abs, [(Source('a', Path('a.h5'), 'h5'), (-3,))], 2)))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode
    assert done.stderr.rstrip().endswith(
        "In a script of one's own the call must stand below if __name__ == '__main__':"
    )
