"""Where environments are found, one file a kind of place. Each reads files alone and yields entries of the catalog.

    folders        Python files of ours and of the owner's, whichever ecosystem their environments follow
    datasets       files with data and the name of a scorer
    targets        YAML files that say what another adapter is to make an environment of
    orchestrator   the environment whose policies direct tools and other models
    reasoning_gym  generated tasks, by the names in the package's files
    installed      the packages of every interpreter that is known
    registered     what the owner added: folders, checkouts, servers, data sets of the Hub

`adapters` tells them what each adapter offers for listing.
"""
