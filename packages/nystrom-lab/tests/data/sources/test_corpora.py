import io
import tarfile

from nystrom_lab.data.sources.corpora import find_corpora


def read(*sources, **options):
    corpora, _ = find_corpora(sources, **options)
    return [piece for corpus in corpora for piece in corpus.pieces()]


def texts(*sources, **options):
    return [piece.text.decode() for piece in read(*sources, **options)]


def test_a_folder_is_read_in_the_order_of_names_with_the_folders_in_it(tmp_path):
    for name in ("b.txt", "a/c.md", "a/a.raw", ".hidden/x.txt", "a/.x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    corpora, left_out = find_corpora([tmp_path])
    names = ["a/a.raw", "a/c.md", "b.txt"]
    assert [path.relative_to(tmp_path).as_posix() for corpus in corpora for path in corpus.paths] == names
    assert [path.name for path in left_out] == ["picture.png"]


def imdb(folder):
    for number, part in enumerate(("test/neg", "test/pos", "train/neg", "train/pos", "train/unsup")):
        (folder / part).mkdir(parents=True)
        (folder / part / f"{number}_1.txt").write_text(part)
    (folder / "README").write_text("about")
    (folder / "train" / "urls_neg.txt").write_text("address")
    return folder


def test_reviews_are_documents_and_those_without_classes_too(tmp_path):
    folder = imdb(tmp_path / "aclImdb")
    wanted = ["test/neg", "test/pos", "train/neg", "train/pos", "train/unsup"]
    assert sorted(texts(folder)) == wanted
    assert sorted(texts(tmp_path)) == wanted
    with tarfile.open(tmp_path / "aclImdb_v1.tar.gz", "w:gz") as archive:
        for path in sorted(folder.rglob("*.txt")):
            member = tarfile.TarInfo(path.relative_to(tmp_path).as_posix())
            member.size = path.stat().st_size
            archive.addfile(member, io.BytesIO(path.read_bytes()))
    assert sorted(texts(tmp_path / "aclImdb_v1.tar.gz")) == wanted
