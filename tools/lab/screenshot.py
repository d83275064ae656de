"""Take the README's screenshot of TensorBoard, of a run's scalars.

    ./run_train.sh                       # the debug run, which writes outputs/debug
    pip install PyQt6-WebEngine          # a browser (Chromium) that needs no display
    python tools/lab/screenshot.py --run outputs/debug

TensorBoard serves the run's event file on a free port of this machine; the browser loads its page
of scalars and writes docs/figures/tensorboard.png. Both end with the script.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "figures" / "tensorboard.png"
SIZE = (1500, 1040)
"""Pixels."""
TAGS = "loss|lr/"
"""TensorBoard shows the charts whose tags match. More would not fit."""
START_SECONDS = 60.0
DRAWING_SECONDS = 10.0
"""From the loaded page to drawn charts. The page does not say when it is done."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="dump folder of a run")
    parser.add_argument("--output", type=Path, default=PICTURE, help="the picture to write")
    options = parser.parse_args(argv)
    try:
        import PyQt6.QtWebEngineWidgets  # noqa: F401
    except ImportError as error:
        print(f"screenshot: {error}: pip install PyQt6-WebEngine", file=sys.stderr)
        return 2
    events = sorted(options.run.rglob("events.out.tfevents.*"))
    if not events:
        print(f"screenshot: {options.run} has no TensorBoard event file", file=sys.stderr)
        return 2
    with tensorboard(events[-1].parent) as address:
        take(f"{address}/?darkMode=false&smoothing=0&tagFilter={TAGS}#timeseries", options.output)
    return 0


@contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """The address of a TensorBoard that shows `folder`, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        address = f"http://127.0.0.1:{port}"
        while True:
            try:
                urllib.request.urlopen(f"{address}/data/environment", timeout=5).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("TensorBoard did not start") from None
                time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait()


def take(address: str, output: Path) -> None:
    """Write a picture of the page. Raises OSError if it was not loaded or the file not written."""
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    # only TensorBoard's own page is loaded, and Chromium's sandbox does not start for root
    os.environ.setdefault("QTWEBENGINE_DISABLE_SANDBOX", "1")
    from PyQt6.QtCore import QTimer, QUrl
    from PyQt6.QtWebEngineWidgets import QWebEngineView
    from PyQt6.QtWidgets import QApplication

    application = QApplication(sys.argv[:1])
    view = QWebEngineView()
    view.resize(*SIZE)

    done: list[bool] = []

    def save() -> None:
        done.append(view.grab().save(str(output)))
        application.quit()

    def drawn(loaded: bool) -> None:
        if loaded:
            QTimer.singleShot(int(DRAWING_SECONDS * 1000), save)
        else:
            application.quit()

    view.loadFinished.connect(drawn)
    view.load(QUrl(address))
    view.show()
    application.exec()
    view.deleteLater()
    if done != [True]:
        raise OSError(f"no picture of {address} was written to {output}")


if __name__ == "__main__":
    sys.exit(main())
