"""Bringing the images of a snapshot's ranks out of the repository, all at once."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torchmig.capture.process import aside, images
from torchmig.criu import Criu
from torchmig.repo import Advance, Depot, RankSection, Reader


def fetch_images(
    depot: Depot,
    criu: Criu,
    snapshot: str,
    sections: Sequence[RankSection],
    reader: Reader,
    work: Path,
    advance: Advance,
) -> None:
    """Write each rank's images into a folder of its own, large ones in processes.

    Args:
        depot: Where the snapshot is.
        criu: The CRIU whose images they are.
        snapshot: Its id, for messages.
        sections: Of the ranks whose images are wanted.
        reader: Of the snapshot, which tells `advance` as well; for small images.
        work: Takes the folders, each of which has a rank's number for its name.
        advance: Told of bytes as they are written.

    Raises:
        TorchmigError: What is stored cannot be read or is damaged, or cannot be written here.
    """
    with ThreadPoolExecutor(max_workers=max(1, len(sections))) as pool:
        beside = []
        for section in sections:
            folder = work / str(section.rank)
            folder.mkdir(mode=0o700)
            prefix = f"rank-{section.rank}/"
            if aside.pays(images.image_bytes(section.streams, prefix)):
                of = (depot, criu, snapshot, section, prefix, folder)
                beside.append(pool.submit(aside.restore_images, *of, advance))
            else:
                images.restore_images(criu, reader, section.streams, prefix, folder)
        for future in beside:
            future.result()
