"""TensorBoard. It has no login; on a Unix socket, the mode of the socket's folder protects it.

The job runs this module, since TensorBoard's own command can't print the address of a Unix socket.
"""

import signal
import sys

from .endpoint import Endpoint, Launch

LISTEN = ("socket", "loopback")
PAGE = "/"


def launch(endpoint: Endpoint) -> Launch:
    """Return the command line of TensorBoard for an experiment, or for one run of it."""
    run = endpoint.record.run
    folder = endpoint.folder / run / "tensorboard" if run else endpoint.folder
    where = [f"--host={endpoint.address}", f"--port={endpoint.record.port}"]
    if endpoint.record.socket:
        where = [f"--host=unix://{endpoint.record.socket}", "--port=0"]
    # The fast loader would be a second server, on a port that all users of the node can reach.
    command = [sys.executable, "-m", __name__, f"--logdir={folder}", *where, "--load_fast=false"]
    return Launch(command)


def main() -> None:
    """Run TensorBoard with the flags of the command line."""
    from tensorboard import default, main_lib, program

    class Server(program.WerkzeugServer):
        def get_url(self) -> str:
            return self._flags.host

    main_lib.global_init()
    board = program.TensorBoard(default.get_plugins(), server_class=Server)
    board.configure(sys.argv)
    board.launch()
    signal.pause()


if __name__ == "__main__":
    main()
