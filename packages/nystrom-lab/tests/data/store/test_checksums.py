import hashlib

import pytest

from nystrom_lab.data.store.prepared_folder import sha256, sha256_of_files


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1])
def test_a_file_has_its_known_digest(tmp_path, size):
    content = bytes(i % 251 for i in range(size))
    (tmp_path / "a").write_bytes(content)
    assert sha256(tmp_path / "a") == hashlib.sha256(content).hexdigest()


def test_a_folder_is_known_by_names_and_contents(tmp_path):
    def digest(**files):
        for path in tmp_path.iterdir():
            path.unlink()
        for name, content in files.items():
            (tmp_path / name).write_text(content)
        return sha256_of_files(tmp_path, sorted(tmp_path.iterdir()))

    base = digest(a="x", b="yz")
    assert digest(b="yz", a="x") == base
    # Another name, other content, and a shifted boundary between the two files.
    assert len({base, digest(a="x", c="yz"), digest(a="x", b="yw"), digest(a="xy", b="z")}) == 4
