"""Sources of environments, one file per kind of place. Each reads files and yields catalog entries.

    folders        shipped and owner's Python files, of any ecosystem
    datasets       data files with the name of a scorer
    targets        YAML files that configure another adapter
    orchestrator   the environment whose policy directs tools and other models
    reasoning_gym  generated tasks, listed from the package's files
    installed      packages of every known interpreter
    registered     environments that the owner added: folders, checkouts, servers, data sets of the Hub

`toprope.workbench.adapters` describes the adapters.
"""
