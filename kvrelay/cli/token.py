"""`kvrelay token`: creates tokens for tenants."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from kvrelay.cli.required_packages import requires_cluster_extra
from kvrelay.cli.terminal.help_page import App
from kvrelay.tenants import Role

app = App(
    help="Create tokens for tenants.",
    epilog="Example: kvrelay token new --tenant acme > acme.token",
)


@app.command()
@requires_cluster_extra
def new(
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Tenant that the token is for.")],
    role: Annotated[
        list[str],
        typer.Option(
            metavar="|".join(get_args(Role)),
            help="Permission: client sends requests, monitor reads /metrics and /status.json, "
            "admin operates the cluster. Repeat the option for several permissions.",
        ),
    ] = ["client"],  # noqa: B006 - typer reads the default and does not change it
) -> None:
    """Create a random token.

    Prints the token on stdout and stores it nowhere. Prints the entry for the file that
    security.tokens_file names on stderr; the entry contains only the hash of the token.

    Example: kvrelay token new --tenant acme > acme.token
    """
    from kvrelay.config.tokens_file import TenantEntry, digest_of, new_token

    token = new_token()
    roles = tuple(known for known in get_args(Role) if known in role)
    for unknown in set(role) - set(roles):
        raise typer.BadParameter(
            f"--role {unknown!r:.80} is unknown; allowed are {', '.join(get_args(Role))}."
        )
    try:
        entry = TenantEntry(name=tenant, tokens_sha256=(digest_of(token),), roles=roles)
    except ValueError:
        raise typer.BadParameter(
            f"--tenant {tenant!r:.80} is not a valid name; allowed are 1 to 63 letters, digits, "
            "'.', '_' and '-', and the first is a letter or digit."
        ) from None
    print(token)
    line = (
        f"  - {{name: {entry.name}, roles: [{', '.join(roles)}], "
        f"tokens_sha256: [{entry.tokens_sha256[0]}]}}"
    )
    typer.echo(
        "# Add this entry under `tenants:` in the tokens file, or the hash to an existing tenant:",
        err=True,
    )
    typer.echo(line, err=True)


@app.callback()
def _group() -> None:
    """Create tokens for tenants."""
    # Without a callback, typer would make the only command of the app the app itself.
