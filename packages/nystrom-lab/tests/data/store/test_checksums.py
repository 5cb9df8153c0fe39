from nystrom_lab.data.store.prepared_folder import sha256_of_files


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
