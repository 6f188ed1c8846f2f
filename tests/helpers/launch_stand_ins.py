"""Stand-ins for the programs that launchers call: shell scripts that note their words."""


def stand_in(folder, name, script):
    """An executable of this name that appends its words to <name>.log and then does what the script says."""
    path = folder / name
    path.write_text(f'#!/bin/bash\nprintf "%s\\n" "$*" >> "{folder}/{name}.log"\n{script}\n')
    path.chmod(0o755)


def calls(folder, name):
    """The words of each call so far, a text for each."""
    log = folder / f"{name}.log"
    return log.read_text().splitlines() if log.exists() else []
