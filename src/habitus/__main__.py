from habitus.cli import main

main()
