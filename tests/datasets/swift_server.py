"""OpenStack Swift in one process: a proxy with s3api, and its storage servers.

Run as a script with a folder that it fills and, at the end, removes; the region; how
many keys a page of a listing has; and users, as ``access key=secret=groups``. It prints
the proxy's port, and serves until its input ends.

Accounts and containers are databases in the folder, with one replica; bodies are in
memory (Swift's own ``mem_object``), so that no filesystem needs extended attributes.
There is no memcached: signed requests do without, only tempauth's tokens need one.
"""

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swift.common.concurrency import listen, monkey_patch, spawn, trampoline, wsgi
from swift.common.http_protocol import SwiftHttpProtocol
from swift.common.ring import RingBuilder
from swift.common.utils import set_swift_dir
from swift.common.utils.logs import NullLogger
from swift.common.wsgi import loadapp

if TYPE_CHECKING:
    import socket

PROXY = """
[pipeline:main]
pipeline = catch_errors gatekeeper s3api tempauth proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:gatekeeper]
use = egg:swift#gatekeeper
[filter:s3api]
use = egg:swift#s3api
location = {region}
max_bucket_listing = {page}
allow_multipart_uploads = false
[filter:tempauth]
use = egg:swift#tempauth
{users}
"""
STORES = {"account": "account", "container": "container", "object": "mem_object"}
# On a busy machine, too, an object is listed before its upload is answered.
STORE = """
[DEFAULT]
devices = {folder}
mount_check = false
[app:main]
use = egg:swift#{app}
container_update_timeout = 60
"""


def port_of(end: "socket.socket") -> int:
    port: int = end.getsockname()[1]
    return port


def make_ring(folder: Path, kind: str, port: int) -> None:
    builder = RingBuilder(part_power=1, replicas=1, min_part_hours=0)
    builder.add_dev(
        {
            "region": 1,
            "zone": 1,
            "weight": 1,
            "ip": "127.0.0.1",
            "port": port,
            "device": "disk",
        }
    )
    builder.rebalance()
    builder.get_ring().save(str(folder / f"{kind}.ring.gz"))


def start(folder: Path, name: str, conf: str, end: "socket.socket") -> None:
    path = folder / f"{name}.conf"
    path.write_text(conf)
    options = {"swift_dir": str(folder), "log_name": name}
    app = loadapp(str(path), global_conf=options)
    # As Swift's own run_server, which takes the whole process for one server.
    manner = {"protocol": SwiftHttpProtocol, "capitalize_response_headers": False}
    spawn(wsgi.server, end, app, NullLogger(), **manner)


def user_line(user: str) -> str:
    key, secret, groups = user.split("=")
    return f"user_{key.replace(':', '_')} = {secret} {groups}"


def serve(folder: Path, region: str, page: str, *users: str) -> None:
    """Start all servers, and wait for the end of the input."""
    (folder / "disk").mkdir()
    (folder / "swift.conf").write_text("[swift-hash]\nswift_hash_path_suffix = x\n")
    set_swift_dir(str(folder))
    bind = partial(listen, ("127.0.0.1", 0))
    for kind, app in STORES.items():
        end = bind()
        make_ring(folder, kind, port_of(end))
        start(folder, kind, STORE.format(folder=folder, app=app), end)
    end = bind()
    lines = "\n".join(map(user_line, users))
    start(folder, "proxy", PROXY.format(region=region, page=page, users=lines), end)
    sys.stdout.write(f"{port_of(end)}\n")
    sys.stdout.flush()
    trampoline(sys.stdin.fileno(), read=True)


if __name__ == "__main__":
    monkey_patch(all=False, socket=True, select=True, thread=True)
    where = Path(sys.argv[1])
    try:
        serve(where, *sys.argv[2:])
    finally:
        shutil.rmtree(where, ignore_errors=True)
