from toprope_server.cli.main import main

main()
