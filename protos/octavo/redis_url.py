"""Where Redis is: one URL for a server, a socket, sentinels or a cluster.

    redis://[user:password@]host[:port][/db]        rediss://... with TLS
    unix://[user:password@]/path/to/socket[?db=n]
    redis+sentinel://[user:password@]host[:port],.../service[?db=n]
    redis+cluster://[user:password@]host[:port],...

More options follow as a query: `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`, `ssl_cert_reqs`
with rediss, rediss+sentinel and rediss+cluster; `sentinel_username` and `sentinel_password`
for the sentinels themselves. Must not know: keys, records. Entry points: `RedisUrl.parse`,
`open_client`, `close_client`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import redis.asyncio
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from octavo.errors import ConfigurationError

_FORMS = {
    "redis": ("", False),
    "rediss": ("", True),
    "unix": ("unix", False),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
_TLS_OPTIONS = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs"})
_SENTINEL_OPTIONS = frozenset({"sentinel_username", "sentinel_password"})
_REDIS_PORT, _SENTINEL_PORT = 6379, 26379


@dataclass(frozen=True, slots=True, repr=False)
class RedisUrl:
    """A checked URL. Its text form shows neither user nor password nor options."""

    scheme: str
    hosts: tuple[tuple[str, int], ...]
    # The socket (unix) or the service's name (sentinel), else "".
    name: str
    db: int
    username: str | None
    password: str | None
    options: Mapping[str, str]

    @classmethod
    def parse(cls, url: str) -> "RedisUrl":
        """Raises ConfigurationError for anything but the forms above."""
        scheme = url.partition("://")[0]
        if scheme not in _FORMS:
            raise _mistake(f"must begin with one of {', '.join(f'{form}://' for form in _FORMS)}")
        topology, is_tls = _FORMS[scheme]
        try:
            split = urlsplit(url)
            userinfo, _, netloc = split.netloc.rpartition("@")
            port = _SENTINEL_PORT if topology == "sentinel" else _REDIS_PORT
            hosts = tuple(_parse_host(host, port) for host in netloc.split(","))
            options = dict(parse_qsl(split.query, strict_parsing=bool(split.query)))
            path = unquote(split.path)
            db = int(options.pop("db", "") or (path.strip("/") if topology == "" else "") or 0)
        except ValueError:
            raise _mistake("hosts, ports, database number or options can't be read") from None
        if len(hosts) > 1 and topology not in ("sentinel", "cluster"):
            raise _mistake("several hosts need redis+sentinel:// or redis+cluster://")
        if topology in ("unix", "sentinel") and not path.strip("/"):
            raise _mistake("the path must name the socket (unix) or the service (sentinel)")
        allowed = (_TLS_OPTIONS if is_tls else frozenset[str]()) | (
            _SENTINEL_OPTIONS if topology == "sentinel" else frozenset[str]()
        )
        if unknown := sorted(set(options) - allowed):
            raise _mistake(f"unknown options {', '.join(unknown)}")
        username, _, password = userinfo.partition(":")
        return cls(
            scheme=scheme,
            hosts=() if topology == "unix" else hosts,
            name={"unix": path, "sentinel": path.strip("/")}.get(topology, ""),
            db=db,
            username=unquote(username) or None,
            password=unquote(password) or None,
            options=options,
        )

    def __str__(self) -> str:
        hosts = ",".join(f"{host}:{port}" for host, port in self.hosts)
        name = f"/{self.name.removeprefix('/')}" if self.name else ""
        return f"{self.scheme}://{hosts}{name}"

    __repr__ = __str__


def _mistake(what: str) -> ConfigurationError:
    # The URL may hold a password: the message doesn't repeat it.
    return ConfigurationError(f"OCTAVO_REDIS_URL: {what}", param="redis_url")


def _parse_host(text: str, default_port: int) -> tuple[str, int]:
    split = urlsplit(f"//{text}")
    return split.hostname or "localhost", split.port or default_port


def open_client(url: RedisUrl, timeout_s: float) -> Any:
    """A redis.asyncio client that waits `timeout_s` for an answer and never tries twice."""
    topology, is_tls = _FORMS[url.scheme]
    common: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if is_tls:
        common |= {name: url.options[name] for name in _TLS_OPTIONS & set(url.options)}
        common["ssl"] = True
    login: dict[str, Any] = {"username": url.username, "password": url.password}
    if topology == "cluster":
        nodes = [ClusterNode(host, port) for host, port in url.hosts]
        return redis.asyncio.RedisCluster(startup_nodes=nodes, **common, **login)
    if topology == "sentinel":
        sentinel_login = {
            name.removeprefix("sentinel_"): url.options[name]
            for name in _SENTINEL_OPTIONS & set(url.options)
        }
        sentinel = redis.asyncio.Sentinel(
            list(url.hosts), sentinel_kwargs=common | sentinel_login, **common
        )
        return sentinel.master_for(url.name, db=url.db, **login)
    if topology == "unix":
        return redis.asyncio.Redis(unix_socket_path=url.name, db=url.db, **common, **login)
    host, port = url.hosts[0]
    return redis.asyncio.Redis(host=host, port=port, db=url.db, **common, **login)


async def close_client(client: Any) -> None:
    """Close every connection of a client of `open_client`, those to sentinels too."""
    pool = getattr(client, "connection_pool", None)
    sentinel = getattr(pool, "sentinel_manager", None)
    clients = [client, *(sentinel.sentinels if sentinel is not None else ())]
    for each in clients:
        await each.aclose()
    if pool is not None:
        await pool.disconnect()
