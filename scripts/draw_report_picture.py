"""Takes the picture of a report for the README: a browser shows the page, the picture is shrunk.

Usage: python scripts/draw_report_picture.py [build/demo/report.html] [docs/report.png]
The page is what `make demo` wrote. Needs Chromium on the path; draws nothing itself.
"""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1000, 1760  # of the window, in pixels: from the verdict to the start-up timeline
SHOWN_WIDTH, COLOURS = 760, 128


def photograph(page: Path, picture: Path) -> None:
    """Has a browser draw the upper part of a page into a PNG."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"no browser: install one of {', '.join(BROWSERS)}")
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={WIDTH},{HEIGHT}",
        f"--screenshot={picture}",
        page.resolve().as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def shrink(taken: Path, target: Path) -> None:
    """Writes a picture smaller, in few colours."""
    image = Image.open(taken).convert("RGB")
    size = (SHOWN_WIDTH, image.height * SHOWN_WIDTH // image.width)
    small = image.resize(size, Image.Resampling.LANCZOS)
    few = small.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(target, "PNG", optimize=True)


def main() -> None:
    """Reads the command line and takes the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path, nargs="?", default=Path("build/demo/report.html"))
    parser.add_argument("picture", type=Path, nargs="?", default=Path("docs/report.png"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / "taken.png"
        photograph(given.page, taken)
        shrink(taken, given.picture)


if __name__ == "__main__":
    main()
