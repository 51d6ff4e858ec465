# fish completion for cloudtrain; written by `cloudtrain completion fish`.
function _cloudtrain_completion
    set -l words (commandline --tokenize --current-process --cut-at-cursor) 
    set -l current (commandline --current-token --cut-at-cursor)
    for line in (_CLOUDTRAIN_COMPLETE=fish command $words[1] $words[2..] "$current" 2>/dev/null)
        set -l field (string split --max 2 \t -- $line)
        switch $field[1]
            case plain part
                if test -n "$field[3]"
                    printf '%s\t%s\n' $field[2] $field[3]
                else
                    echo $field[2]
                end
            case file
                __fish_complete_path $current
            case dir
                __fish_complete_directories $current ''
        end
    end
end
complete --command cloudtrain --no-files --keep-order --arguments '(_cloudtrain_completion)'
