"""The service's part of the configuration, ``[serve]``."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from radixkv.errors import ConfigError
from radixkv.rest import MAX_PROMPT_TOKENS

MIN_SECRET = 16
"""Characters of a bearer token at least: a shorter one can be guessed."""
READ_ACCESS = ("auto", "open", "token")


@dataclass(frozen=True, slots=True)
class TenantToken:
    """A bearer token that is bound to the namespaces with one salt."""

    token: str
    salt: str

    def __post_init__(self) -> None:
        check_secret("serve.tenants token", self.token)
        if not isinstance(self.salt, str) or not self.salt:
            raise ConfigError("serve.tenants salt must be text, and not empty")

    def __repr__(self) -> str:
        return "TenantToken(...)"


@dataclass(frozen=True, slots=True, repr=False)
class ServiceConfig:
    """How a service listens, whom it lets in, and its limits.

    host, port: where it listens (0: any free port). store: a store folder to serve, read-only; empty: the cache that
    the rest of the configuration describes. token: bearer token for everything; token_file: a file that holds it.
    tenants: tokens that see the namespaces with their salt alone. read_access: "open" or "token": whether routes that
    change nothing need one too; "auto": where the host is no loopback address, or a tenant's token is configured.

    max_body_bytes, max_tokens: of one request. body_timeout_s: for a whole body to arrive. threads: that cache calls
    run on. max_jobs: prefetches under way or not yet forgotten. refresh_s: how old answers about a store folder may be.
    tick_s: pause between turns of housekeeping. close_timeout_s: for requests under way, and for what is still to be
    written, when it stops.
    """

    host: str = "127.0.0.1"
    port: int = 8090
    store: str = ""
    token: str = ""
    token_file: str = ""
    tenants: tuple[TenantToken, ...] = ()
    read_access: str = "auto"
    max_body_bytes: int = 8 << 20
    max_tokens: int = MAX_PROMPT_TOKENS
    body_timeout_s: float = 30.0
    threads: int = 4
    max_jobs: int = 1024
    refresh_s: float = 1.0
    tick_s: float = 0.05
    close_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("host", "store", "token", "token_file"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"serve.{name} must be text, not {getattr(self, name)!r}")
        _whole("port", self.port, 0, 65535)
        _whole("max_body_bytes", self.max_body_bytes, 1024, 1 << 30)
        _whole("max_tokens", self.max_tokens, 1, MAX_PROMPT_TOKENS)
        _whole("threads", self.threads, 1, 256)
        _whole("max_jobs", self.max_jobs, 1, 1 << 20)
        for name in ("body_timeout_s", "refresh_s", "tick_s", "close_timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 86400:
                raise ConfigError(f"serve.{name} must be a number in (0, 86400], not {value!r}")
        if self.read_access not in READ_ACCESS:
            raise ConfigError(f"serve.read_access {self.read_access!r} is not one of {', '.join(READ_ACCESS)}")
        if self.token and self.token_file:
            raise ConfigError("serve.token and serve.token_file are two answers to one question: give one of them")
        if self.token:
            check_secret("serve.token", self.token)
        if not all(isinstance(tenant, TenantToken) for tenant in self.tenants):
            raise ConfigError("serve.tenants must be a list of tokens with their salts")
        secrets = [tenant.token for tenant in self.tenants] + [self.token] * bool(self.token)
        if len(set(secrets)) < len(secrets):
            raise ConfigError("two of the tokens in serve.token and serve.tenants are the same")
        if self.tenants and self.read_access == "open":
            raise ConfigError(
                "serve.read_access 'open' would show every tenant's counts to anybody: serve.tenants is set"
            )

    def __repr__(self) -> str:
        return f"ServiceConfig(host={self.host!r}, port={self.port}, store={self.store!r}, ...)"

    @property
    def reads_need_token(self) -> bool:
        """Whether routes that change nothing need a bearer token too."""
        if self.read_access == "auto":
            return bool(self.tenants) or not is_loopback(self.host)
        return self.read_access == "token"

    def secret(self) -> str:
        """The bearer token for everything, given or read from its file; empty: none. Raises ConfigError."""
        if not self.token_file:
            return self.token
        try:
            secret = Path(self.token_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"serve.token_file {self.token_file} cannot be read: {error}") from None
        check_secret(f"what serve.token_file {self.token_file} holds", secret)
        return secret

    def check_exposure(self) -> None:
        """Raise ConfigError for a host that others can reach where no token is configured."""
        if not is_loopback(self.host) and not (self.token or self.token_file or self.tenants):
            raise ConfigError(
                f"serve.host {self.host!r} can be reached from other machines: set serve.token or serve.token_file"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``. A name counts as loopback only if it is ``localhost``."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_secret(where: str, secret: object) -> None:
    """Raise ConfigError for a bearer token that is too short or cannot be sent in a header. Never shows it."""
    if not isinstance(secret, str) or len(secret) < MIN_SECRET or not secret.isascii() or not secret.isprintable():
        raise ConfigError(f"{where} must have at least {MIN_SECRET} characters, all printable ASCII")
    if " " in secret:
        raise ConfigError(f"{where} must not hold spaces")


def _whole(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"serve.{name} must be an integer in [{low}, {high}], not {value!r}")
