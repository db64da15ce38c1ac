"""Views take a chain, a loader or a batch; samples and images show themselves in notebooks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from IPython.core.formatters import DisplayFormatter
from torch.utils.data import DataLoader

import kdpipes as kdp
from kdpipes.look import replay_grid
from kdpipes.work import EncodedImage


@pytest.fixture
def photos(photo_folder: Path) -> Any:
    return kdp.image_folder(photo_folder).decode_images("x").transform("x", kdp.Resize((32, 32)), kdp.HorizontalFlip())


def dealt(photos: Any) -> Any:
    return photos.select("x y").deal(batch_size=8, shuffle=True, seed=0)


def test_show_batch_shows_the_first_batch_or_samples(photos: Any, photo_shards: str) -> None:
    samples = [photos[place] for place in range(16)]
    assert kdp.show_batch(photos).tobytes() == kdp.show_batch(samples, photos).tobytes()
    stream = kdp.stream_shards(photo_shards).rename_fields(x="jpg", y="cls")
    assert kdp.show_batch(stream).size == kdp.show_batch(photos).size
    for chain in (dealt(photos), dealt(photos).collate_samples()):
        batch = next(iter(kdp.Loader(chain)))
        for subject in (chain, kdp.Loader(chain), DataLoader(chain, batch_size=None)):
            assert kdp.show_batch(subject).tobytes() == kdp.show_batch(batch, subject).tobytes()


def test_views_of_chains_and_loaders_agree_and_advance_nothing(photos: Any) -> None:
    chain = dealt(photos).collate_samples()
    expected = [y.tolist() for _, y in dealt(photos).collate_samples()]
    with kdp.Loader(chain, num_workers=1) as loader:
        before = loader.state_dict(), random.getstate()
        for view in (kdp.plot_classes, lambda subject: kdp.doctor(subject, measure=False)):
            assert len({repr(view(subject)) for subject in (chain, loader, DataLoader(chain, batch_size=None))}) == 1
        for picture in (kdp.show_batch, replay_grid):
            assert picture(loader).tobytes() == picture(chain).tobytes()
        assert (loader.state_dict(), random.getstate()) == before
        assert [y.tolist() for _, y in loader] == [y.tolist() for _, y in chain] == expected


@pytest.mark.parametrize(
    ("name", "subject", "words"),
    [
        *((name, [1], rf"is a list .* `kdp\.{name}\(chain\)`") for name in ("doctor", "plot_classes", "profile")),
        ("profile", kdp.Loader(kdp.from_dataset([1], "x").deal(batch_size=1)), r"profile=True.*`kdp\.profile\(pipe\)`"),
        ("show_batch", kdp.from_dataset([], "x"), r"yields nothing\. Look at `len\(pipe\)`"),
    ],
)
def test_what_lacks_what_a_view_needs_names_the_way_out(name: str, subject: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        getattr(kdp, name)(subject)


def test_images_and_samples_show_themselves(photo_folder: Path, photos: Any) -> None:
    def shown(value: Any) -> Any:
        return DisplayFormatter().format(value)[0]

    content = next(photo_folder.rglob("*.jpg")).read_bytes()
    for image in (photos[0]["x"], EncodedImage(content), EncodedImage(content, mode="L")):
        assert EncodedImage(shown(image)["image/png"]).size == image.size
    assert shown(EncodedImage(content[:200])).keys() == {"text/plain"}
    html = shown(photos.record_ctx()[0])["text/html"]
    assert html.count("data:image/png;base64,") == 1
    assert photos[0].key in html
